// Writes down what is said in a recording.
import type { JSX } from "preact";
import { useId } from "preact/hooks";
import { useStore } from "../../state";
import { change, session } from "./session";
import { Buttons, Outcome, useTask } from "./task";

export function Transcription({ model }: { model: string }): JSX.Element {
    const { recording: file } = useStore(session);
    const { task, go, stop } = useTask<{ text?: string }>();
    const id = useId();
    const ask = (): void => {
        if (file === null) return;
        const form = new FormData();
        form.set("model", model);
        form.set("file", file);
        void go("v1/audio/transcriptions", form);
    };
    return (
        <>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    ask();
                }}
            >
                <div class="field wide">
                    <label for={id}>Recording</label>
                    <input
                        id={id}
                        type="file"
                        accept="audio/*,video/*"
                        onChange={(event) => change({ recording: event.currentTarget.files?.[0] ?? null })}
                    />
                    <span class="hint">{file === null ? "at most 16 MB" : file.name}</span>
                </div>
                <Buttons title="Write down" canGo={file !== null} task={task} stop={stop} />
            </form>
            <Outcome task={task} />
            {task.value === null ? null : <div class="text">{task.value.text ?? ""}</div>}
        </>
    );
}
