// What was done lately, by anybody.
import type { JSX } from "preact";
import { clock } from "../../format";
import { actions } from "../../live";
import { useStore } from "../../state";
import { Empty, Section } from "../../ui/parts";
import { Results } from "./ask";

const QUIET = new Set(["keys_list", "usage"]);

export function DoneList(): JSX.Element {
    const done = useStore(actions).filter((one) => !QUIET.has(one.verb));
    return (
        <Section title="Done">
            {done.length === 0 ? (
                <Empty>Nothing was done since the console started.</Empty>
            ) : (
                <ol class="plain done">
                    {done.map((one) => (
                        <li key={`${one.at} ${one.verb}`}>
                            <span class="faint">{clock(one.at)}</span> <strong>{one.verb}</strong>
                            <Results results={one.results} />
                        </li>
                    ))}
                </ol>
            )}
        </Section>
    );
}
