// The first page: how the deployment is built, how it does, what is wrong and what to do.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get } from "../api";
import { ago, count, plural } from "../format";
import { heard, opened, overview, samples, workerName } from "../live";
import { keep, link, route } from "../route";
import { useStore } from "../state";
import type { History, Numbers, Overview, Problem, Process } from "../types";
import { Empty, Section, Stat, State } from "../ui/parts";
import { Spark } from "../ui/spark";
import { Topology } from "./overview/topology";
import { WorkerDetail, WorkerTable } from "./overview/workers";

/** The server asks everybody at least once a minute. */
const OLD_SECONDS = 75;

export function OverviewPage(): JSX.Element {
    const now = useStore(overview);
    const { query } = useStore(route);
    if (now === null) return <Empty>Waiting for the first figures…</Empty>;
    const chosen = query.get("worker");
    const worker = now.workers.find((one) => one.id === chosen);
    const others = now.processes.filter((process) => process.state !== "running" && process.state !== "ready");
    return (
        <>
            <Age />
            <Problems problems={now.problems} />
            <Totals now={now} />
            <Section title="Topology" aside={<Legend />}>
                <Topology now={now} />
            </Section>
            {worker === undefined ? null : <WorkerDetail key={worker.id} worker={worker} />}
            {chosen !== null && worker === undefined ? <Gone name={chosen} /> : null}
            <Section title="Workers" aside={<span class="faint">{plural(now.workers.length, "worker")}</span>}>
                <WorkerTable workers={now.workers} />
            </Section>
            {others.length === 0 ? null : <Processes processes={others} />}
        </>
    );
}

function Age(): JSX.Element | null {
    const [, tick] = useState(0);
    useEffect(() => {
        const timer = window.setInterval(() => tick((n) => n + 1), 5000);
        return () => window.clearInterval(timer);
    }, []);
    const at = heard.get() / 1000;
    if (Date.now() / 1000 - at < OLD_SECONDS) return null;
    return <p class="notice warn">These figures are old: the last ones came {ago(at)}.</p>;
}

function Gone({ name }: { name: string }): JSX.Element {
    return (
        <p class="notice warn">
            The worker {name} is not there any more.{" "}
            <button type="button" class="small" onClick={() => keep({ worker: "" })}>
                Close
            </button>
        </p>
    );
}

const MOST_PROBLEMS = 4;

function Problems({ problems }: { problems: readonly Problem[] }): JSX.Element {
    const sorted = [...problems].sort((a, b) => Number(b.severity === "error") - Number(a.severity === "error"));
    const rest = sorted.slice(MOST_PROBLEMS);
    return (
        <>
            <div role="status" class="problems">
                {problems.length === 0 ? <p class="notice good">Nothing is wrong.</p> : null}
                {sorted.slice(0, MOST_PROBLEMS).map((problem) => (
                    <ProblemView key={`${problem.what} ${problem.worker}`} problem={problem} />
                ))}
            </div>
            {rest.length === 0 ? null : (
                <details class="card">
                    <summary>{plural(rest.length, "more problem")}</summary>
                    <div class="problems">
                        {rest.map((problem) => (
                            <ProblemView key={`${problem.what} ${problem.worker}`} problem={problem} />
                        ))}
                    </div>
                </details>
            )}
        </>
    );
}

function ProblemView({ problem }: { problem: Problem }): JSX.Element {
    return (
        <div class={`notice ${problem.severity === "error" ? "bad" : "warn"}`}>
            <strong>
                <span class="hidden">{problem.severity}: </span>
                {problem.what}
            </strong>
            {problem.why === null ? null : <span>{problem.why}</span>}
            {problem.fix === null ? null : <span class="fix">What to do: {problem.fix}</span>}
            {problem.worker === null ? null : (
                <a href={link("", "", { worker: problem.worker })}>Show {workerName(problem.worker)}</a>
            )}
        </div>
    );
}

const FIGURES = [
    ["requests_per_second", "Requests", "/s"],
    ["tokens_per_second", "Tokens", "/s"],
    ["in_flight", "In flight", "requests"],
    ["errors_per_second", "Errors", "/s"],
] as const;

function Totals({ now }: { now: Overview }): JSX.Element {
    const [past, setPast] = useState<History | null>(null);
    const stream = useStore(opened);
    useEffect(() => {
        get<History>("api/history", { seconds: 600 }).then(setPast, () => undefined);
    }, [stream]);
    const until = past?.series.at.at(-1) ?? 0;
    const live = useStore(samples).filter((sample) => sample.at > until);
    const lines = (key: string): Numbers => {
        const name = key === "tokens_per_second" ? "output_tokens_per_second" : key;
        const before = (past?.series as unknown as Record<string, Numbers> | undefined)?.[name] ?? [];
        return [
            ...before,
            ...live.map((sample) => (typeof sample[name] === "number" ? (sample[name] as number) : null)),
        ].slice(-120);
    };
    return (
        <dl class="stats">
            {FIGURES.map(([key, name, unit]) => (
                <Stat key={key} name={name} value={count(now.totals[key])} unit={unit}>
                    <Spark values={lines(key)} />
                </Stat>
            ))}
        </dl>
    );
}

function Legend(): JSX.Element {
    return (
        <span class="legend">
            <span class="key requests">requests</span>
            <span class="key kv">KV cache</span>
            <span class="key encoded">encoded images</span>
        </span>
    );
}

function whyNot(process: Process): string {
    if (process.phase === "drained") return ` by an operator, ${ago(process.since)}; a restart starts it again `;
    return process.last_exit == null ? "" : ` ${process.last_exit.reason}, ${ago(process.last_exit.at)} `;
}

function Processes({ processes }: { processes: readonly Process[] }): JSX.Element {
    return (
        <Section title="Processes that are not ready">
            <ul class="plain">
                {processes.map((process) => (
                    <li key={process.name}>
                        {process.name} <State of={process.phase ?? process.state} />
                        {whyNot(process)}{" "}
                        <a href={link("logs", process.name)} aria-label={`Log of ${process.name}`}>
                            log
                        </a>
                    </li>
                ))}
            </ul>
        </Section>
    );
}
