// Acts on workers, adapters, groups and keys. Each act asks first and shows the same as a command.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { ago, plural } from "../format";
import { overview, settings } from "../live";
import { keep, link, route } from "../route";
import { useStore } from "../state";
import type { Overview, Process, Worker } from "../types";
import { Choice, Empty, Notice, Section, State } from "../ui/parts";
import { Table, type Column } from "../ui/table";
import { Ask, type Question } from "./operate/ask";
import { DoneList } from "./operate/done";
import { Gateway } from "./operate/gateway";
import { drainOf, LOAD, restart, scale, unload, VERBS, type VerbInfo } from "./operate/verbs";

type AskFor = (question: Question) => void;

export function OperatePage(): JSX.Element {
    const known = useStore(settings);
    const now = useStore(overview);
    const [question, ask] = useState<Question | null>(null);
    if (known?.read_only === true)
        return (
            <Notice tone="idle">
                This console is read only. Use the command line, or start the console without --console-read-only.
            </Notice>
        );
    if (known === null || now === null) return <Empty>Waiting for the first figures…</Empty>;
    const verbs = new Set(known.actions);
    if (verbs.size === 0) return <Empty>This console can change nothing here.</Empty>;
    return (
        <>
            <Workers now={now} verbs={verbs} ask={ask} />
            {verbs.has("load_lora") ? <AdapterTable now={now} ask={ask} /> : null}
            {known.run_folder ? <Processes now={now} verbs={verbs} ask={ask} /> : null}
            {verbs.has("scale") ? <Groups now={now} ask={ask} /> : null}
            {verbs.has("keys_list") ? <Gateway verbs={verbs} /> : null}
            <DoneList />
            {question === null ? null : <Ask question={question} onClose={() => ask(null)} />}
        </>
    );
}

function nameOf(worker: Worker): string {
    return worker.process ?? worker.id;
}

function Workers({ now, verbs, ask }: { now: Overview; verbs: ReadonlySet<string>; ask: AskFor }): JSX.Element {
    const { query } = useStore(route);
    const wanted = query.get("worker") ?? "";
    const chosen = now.workers.find((worker) => worker.id === wanted);
    // A worker that started again has another id. Acts on one that is gone must not become acts on all.
    const isGone = wanted !== "" && chosen === undefined;
    const offered = VERBS.filter((info) => verbs.has(info.verb));
    const options = now.workers.map(
        (worker) => [worker.id, `${nameOf(worker)} (${worker.role ?? "?"}, ${worker.state})`] as const,
    );
    return (
        <Section title="Workers">
            <div class="bar-of">
                <Choice
                    label="Act on"
                    value={wanted}
                    options={[
                        ["", `all ${plural(now.workers.length, "worker")}`],
                        ...options,
                        ...(isGone ? [[wanted, `${wanted} (gone)`] as const] : []),
                    ]}
                    onChoose={(id) => keep({ worker: id })}
                />
                {chosen === undefined ? null : <State of={chosen.state} />}
            </div>
            <div class="verbs">
                {offered.map((info) => (
                    <div key={info.verb}>
                        <button
                            type="button"
                            aria-describedby={`does-${info.verb}`}
                            disabled={isGone}
                            onClick={() =>
                                ask({
                                    info,
                                    worker: chosen?.id ?? null,
                                    name: chosen === undefined ? "all workers" : nameOf(chosen),
                                })
                            }
                        >
                            {info.title}
                        </button>
                        <span id={`does-${info.verb}`} class="hint">
                            {info.does}
                        </span>
                    </div>
                ))}
            </div>
        </Section>
    );
}

interface AdapterRow {
    name: string;
    states: string[];
    workers: number;
    leases: number;
}

function adaptersOf(workers: readonly Worker[]): AdapterRow[] {
    const rows = new Map<string, AdapterRow>();
    for (const worker of workers) {
        for (const { name, state, leases } of worker.adapters) {
            const row = rows.get(name) ?? { name, states: [], workers: 0, leases: 0 };
            if (!row.states.includes(state)) row.states.push(state);
            row.workers += 1;
            row.leases += leases;
            rows.set(name, row);
        }
    }
    return [...rows.values()].sort((a, b) => a.name.localeCompare(b.name));
}

function AdapterTable({ now, ask }: { now: Overview; ask: AskFor }): JSX.Element {
    const load = (
        <>
            <span class="push" />
            <button type="button" class="small" onClick={() => ask({ info: LOAD, worker: null, name: "all workers" })}>
                Load an adapter
            </button>
        </>
    );
    return (
        <Section title="Adapters" aside={load}>
            <Table
                caption="Adapters"
                rows={adaptersOf(now.workers)}
                keyOf={(row) => row.name}
                empty="No adapter is loaded."
                columns={[
                    { title: "Adapter", isName: true, cell: (row) => row.name },
                    {
                        title: "State",
                        cell: (row) => (
                            <>
                                {row.states.map((state) => (
                                    <State key={state} of={state} />
                                ))}
                            </>
                        ),
                    },
                    { title: "Workers", isNumber: true, cell: (row) => row.workers },
                    { title: "Requests that use it", isNumber: true, cell: (row) => row.leases },
                    {
                        title: "Act",
                        cell: (row) => (
                            <button
                                type="button"
                                class="small"
                                aria-label={`Unload ${row.name}`}
                                onClick={() => ask({ info: unload(row.name), worker: null, name: "all workers" })}
                            >
                                Unload
                            </button>
                        ),
                    },
                ]}
            />
        </Section>
    );
}

const SUPERVISED = new Set(["console"]);
const DRAINED = "drained";

/** The phase says more than these states: how far a start is, and that a stop was on purpose. */
function stateOf(one: Process): string {
    return one.state === "starting" || one.state === "stopped" ? (one.phase ?? one.state) : one.state;
}

/** The processes of a `serve` on this machine. */
function Processes({ now, verbs, ask }: { now: Overview; verbs: ReadonlySet<string>; ask: AskFor }): JSX.Element {
    const columns: Column<Process>[] = [
        {
            title: "Process",
            isName: true,
            cell: (one) => (
                <a href={link("logs", one.name)} aria-label={`Log of ${one.name}`}>
                    {one.name}
                </a>
            ),
        },
        {
            title: "State",
            cell: (one) => <State of={stateOf(one)} />,
        },
        { title: "Since", isNumber: true, cell: (one) => ago(one.since) },
        { title: "Restarts", isNumber: true, cell: (one) => one.restarts ?? "–" },
        {
            title: "Last exit",
            isWide: true,
            cell: (one) => (
                <span class="names">
                    {one.last_exit == null ? "–" : `${one.last_exit.reason}, ${ago(one.last_exit.at)}`}
                </span>
            ),
        },
    ];
    const button = (info: VerbInfo, one: Process, isOffered: boolean): JSX.Element | null =>
        isOffered && verbs.has(info.verb) ? (
            <button
                type="button"
                class="small"
                aria-label={`${info.title} ${one.name}`}
                onClick={() => ask({ info, worker: one.name, name: one.name })}
            >
                {info.title}
            </button>
        ) : null;
    const isLast = (one: Process): boolean =>
        !now.processes.some((other) => other !== one && other.group === one.group && other.state === "ready");
    if (verbs.has("restart")) {
        columns.push({
            title: "Act",
            cell: (one) => (
                <span class="acts">
                    {button(restart(one.name), one, !SUPERVISED.has(one.kind))}
                    {button(drainOf(one.name, isLast(one)), one, one.kind === "worker" && one.phase !== DRAINED)}
                </span>
            ),
        });
    }
    return (
        <Section title="Processes">
            <Table
                caption="Processes"
                rows={now.processes}
                keyOf={(one) => one.name}
                columns={columns}
                empty="No process is known."
            />
        </Section>
    );
}

interface Group {
    name: string;
    size: number;
    ready: number;
}

/** Groups as `serve` names them; without one on this machine, roles. */
function groupsOf(now: Overview): Group[] {
    const groups = new Map<string, Group>();
    const add = (name: string, isReady: boolean): void => {
        const group = groups.get(name) ?? { name, size: 0, ready: 0 };
        groups.set(name, { name, size: group.size + 1, ready: group.ready + Number(isReady) });
    };
    const named = now.processes.filter((one) => one.group);
    if (named.length > 0) for (const one of named) add(one.group!, one.state === "ready" || one.state === "running");
    else for (const worker of now.workers) add(worker.group ?? worker.role ?? "unknown", worker.state === "ready");
    return [...groups.values()];
}

function Groups({ now, ask }: { now: Overview; ask: AskFor }): JSX.Element {
    return (
        <Section title="Groups">
            <Table
                caption="Groups of workers"
                rows={groupsOf(now)}
                keyOf={(group) => group.name}
                columns={[
                    { title: "Group", isName: true, cell: (group) => group.name },
                    { title: "Workers", isNumber: true, cell: (group) => group.size },
                    { title: "Ready", isNumber: true, cell: (group) => group.ready },
                    {
                        title: "Act",
                        cell: ({ name, size }) => (
                            <button
                                type="button"
                                class="small"
                                aria-label={`Scale ${name}`}
                                onClick={() =>
                                    ask({ info: scale(name, size), worker: null, name: `group ${name}`, group: name })
                                }
                            >
                                Scale
                            </button>
                        ),
                    },
                ]}
            />
        </Section>
    );
}
