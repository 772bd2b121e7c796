// Sampling controls, tools and the key.
import type { JSX } from "preact";
import { useStore } from "../../state";
import { Area, Check, Input } from "../../ui/parts";
import type { Sampling } from "./request";
import { change, key, session } from "./session";

const EXAMPLE = JSON.stringify(
    [
        {
            type: "function",
            function: {
                name: "weather",
                description: "The weather in a city",
                parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
            },
        },
    ],
    null,
    2,
);

export function Controls({ isChat }: { isChat: boolean }): JSX.Element {
    const { sampling } = useStore(session);
    const typed = useStore(key);
    const set =
        <K extends keyof Sampling>(name: K) =>
        (value: Sampling[K]) =>
            change({ sampling: { ...sampling, [name]: value } });
    return (
        <>
            <div class="form tight">
                <Input
                    label="Temperature"
                    type="number"
                    min={0}
                    max={2}
                    step={0.1}
                    value={sampling.temperature}
                    onInput={set("temperature")}
                />
                <Input
                    label="Top p"
                    type="number"
                    min={0}
                    max={1}
                    step={0.05}
                    value={sampling.top_p}
                    onInput={set("top_p")}
                    placeholder="1"
                />
                <Input
                    label="Most tokens"
                    type="number"
                    min={1}
                    value={sampling.max_tokens}
                    onInput={set("max_tokens")}
                />
                <Input label="Seed" type="number" value={sampling.seed} onInput={set("seed")} placeholder="random" />
            </div>
            <div class="checks">
                <Check label="Stream" checked={sampling.stream} onChange={set("stream")} />
                <Check label="Log-probabilities" checked={sampling.logprobs} onChange={set("logprobs")} />
            </div>
            {isChat ? <Area label="System" rows={2} value={sampling.system} onInput={set("system")} /> : null}
            <details>
                <summary>More</summary>
                <div class="form tight">
                    <Input
                        label="Presence penalty"
                        type="number"
                        min={-2}
                        max={2}
                        step={0.1}
                        value={sampling.presence_penalty}
                        onInput={set("presence_penalty")}
                        placeholder="0"
                    />
                    <Input
                        label="Frequency penalty"
                        type="number"
                        min={-2}
                        max={2}
                        step={0.1}
                        value={sampling.frequency_penalty}
                        onInput={set("frequency_penalty")}
                        placeholder="0"
                    />
                </div>
                <Area label="Stop at" rows={2} value={sampling.stop} onInput={set("stop")} hint="one text per line" />
                {isChat ? (
                    <>
                        <Area
                            label="Tools"
                            rows={4}
                            mono
                            value={sampling.tools}
                            onInput={set("tools")}
                            hint="JSON, as the API takes it"
                        />
                        <button type="button" class="small" onClick={() => set("tools")(EXAMPLE)}>
                            Fill in an example
                        </button>
                    </>
                ) : null}
                <Area
                    label="More fields"
                    rows={2}
                    mono
                    value={sampling.extra}
                    onInput={set("extra")}
                    hint="JSON that is added to the request"
                />
                <Input
                    label="API key"
                    type="password"
                    value={typed}
                    onInput={(value) => key.set(value)}
                    hint="for a gateway; stays in this page"
                    wide
                />
            </details>
        </>
    );
}
