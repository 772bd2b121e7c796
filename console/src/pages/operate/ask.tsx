// Asks before something is done, does it, and says what became of it.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { post, sentence } from "../../api";
import { actions, connection, workerName, type Done } from "../../live";
import { prepend } from "../../state";
import type { ActionResult } from "../../types";
import { Code } from "../../ui/code";
import { Dialog } from "../../ui/dialog";
import { Choice, Input, Notice } from "../../ui/parts";
import { commandOf, type FieldInfo, type Values, type VerbInfo } from "./verbs";

export interface Question {
    info: VerbInfo;
    worker: string | null;
    /** How the worker is called where people read it. */
    name: string;
    group?: string;
}

export function Ask({ question, onClose }: { question: Question; onClose: () => void }): JSX.Element {
    const { info, worker, name, group } = question;
    const [values, setValues] = useState<Values>(() =>
        Object.fromEntries(info.fields.map((field) => [field.key, field.start])),
    );
    const [isBusy, setBusy] = useState(false);
    const [problem, setProblem] = useState<string | null>(null);
    const [results, setResults] = useState<ActionResult[] | null>(null);
    const act = async (): Promise<void> => {
        setBusy(true);
        setProblem(null);
        try {
            const done = await perform(info.verb, worker, info.body(values), group);
            setResults(done);
        } catch (error) {
            setProblem(sentence(error));
        }
        setBusy(false);
    };
    const isReady = info.fields.every((field) => field.isNeeded !== true || (values[field.key] ?? "").trim() !== "");
    return (
        <Dialog title={`${info.title}: ${name}`} onClose={onClose}>
            <p>{info.does}</p>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    void act();
                }}
            >
                {results === null
                    ? info.fields.map((field) => (
                          <FieldOf
                              key={field.key}
                              field={field}
                              value={values[field.key] ?? ""}
                              onChange={(value) => setValues({ ...values, [field.key]: value })}
                          />
                      ))
                    : null}
                <Code label="The same as a command" text={commandOf(info, values, worker)} />
                {problem === null ? null : <Notice>{problem}</Notice>}
                <div role="status">{results === null ? isBusy ? "Working…" : "" : <Results results={results} />}</div>
                <div class="buttons">
                    {results === null ? (
                        <>
                            <button
                                type="submit"
                                class={info.isHarsh === true ? "danger" : "primary"}
                                disabled={isBusy || !isReady}
                            >
                                {info.title}
                            </button>
                            <button type="button" onClick={onClose}>
                                Cancel
                            </button>
                        </>
                    ) : (
                        <button type="button" class="primary" onClick={onClose}>
                            Close
                        </button>
                    )}
                </div>
            </form>
        </Dialog>
    );
}

/** Asks the server to do it. What was done comes to all pages that listen; one that does not notes it itself. */
export async function perform(
    verb: string,
    worker: string | null,
    body: unknown,
    group?: string,
): Promise<ActionResult[]> {
    const { results } = await post<{ results: ActionResult[] }>(`api/actions/${verb}`, {
        worker,
        body,
        ...(group === undefined ? {} : { group }),
    });
    if (connection.get() !== "live") {
        const told = results.map(({ worker, ok, said }) => ({ worker, ok, said }));
        actions.set(prepend(actions.get(), [{ at: Date.now() / 1000, verb, results: told }], 50));
    }
    return results;
}

/** Does what has one result, and returns what it has to say. */
export async function reply<T>(verb: string, body: unknown): Promise<T> {
    const [result] = await perform(verb, null, body);
    if (result === undefined || !result.ok) throw new Error(result?.said ?? "Nobody answered.");
    return result.reply as T;
}

function FieldOf({
    field,
    value,
    onChange,
}: {
    field: FieldInfo;
    value: string;
    onChange: (value: string) => void;
}): JSX.Element {
    if (field.type === "choice")
        return <Choice label={field.label} value={value} options={field.options ?? []} onChoose={onChange} />;
    return (
        <Input
            label={field.label}
            type={field.type}
            value={value}
            onInput={onChange}
            required={field.isNeeded ?? false}
            {...(field.type === "number" ? { min: 0 } : {})}
        />
    );
}

export function Results({ results }: { results: Done["results"] }): JSX.Element {
    if (results.length === 0) return <p>There was nobody to ask.</p>;
    return (
        <ul class="plain results">
            {results.map((result) => (
                <li key={result.worker ?? "all"} class={result.ok ? "said good" : "said bad"}>
                    {result.worker === null ? null : <strong>{workerName(result.worker)}: </strong>}
                    {result.ok || result.said.startsWith("refused") ? "" : "failed: "}
                    {result.said}
                </li>
            ))}
        </ul>
    );
}
