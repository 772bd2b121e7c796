// What an operator can do: the words of each question, its fields, and the same as a command line.

export interface FieldInfo {
    key: string;
    label: string;
    type: "text" | "number" | "choice";
    start: string;
    options?: readonly (readonly [string, string])[];
    isNeeded?: boolean;
}

export type Values = Record<string, string>;

export interface VerbInfo {
    verb: string;
    title: string;
    /** What happens, for the question before it. */
    does: string;
    fields: readonly FieldInfo[];
    body: (values: Values) => Record<string, unknown>;
    /** The command line without what chooses the workers. */
    command: (values: Values) => string;
    /** Takes workers out of service or loses something: the button says so by its colour. */
    isHarsh?: boolean;
    /** Applies to all workers unless one is chosen, also on the command line. */
    isEverywhere?: boolean;
    /** The command itself names what it acts on. */
    isNamed?: boolean;
}

const DRAIN: FieldInfo = {
    key: "drain_seconds",
    label: "Seconds for running requests to finish",
    type: "number",
    start: "30",
};
const nothing = (): Record<string, unknown> => ({});

function numbers(values: Values, ...keys: string[]): Record<string, number> {
    return Object.fromEntries(
        keys.filter((key) => (values[key] ?? "") !== "").map((key) => [key, Number(values[key])]),
    );
}

function drain(values: Values): string {
    return values["drain_seconds"] ? ` --drain-seconds ${values["drain_seconds"]}` : "";
}

export const VERBS: readonly VerbInfo[] = [
    {
        verb: "sleep",
        title: "Sleep",
        isHarsh: true,
        fields: [
            {
                key: "level",
                label: "Level",
                type: "choice",
                start: "1",
                options: [
                    ["1", "1: weights stay in host memory"],
                    ["2", "2: weights are dropped"],
                ],
            },
            DRAIN,
        ],
        does: "The worker leaves service, finishes its requests and gives its memory back.",
        body: (values) => numbers(values, "level", "drain_seconds"),
        command: (values) => `sleep --level ${values["level"]}${drain(values)}`,
    },
    {
        verb: "wake_up",
        title: "Wake",
        fields: [],
        does: "The worker takes its memory again and comes back into service.",
        body: nothing,
        command: () => "wake",
    },
    {
        verb: "pause",
        title: "Pause",
        isHarsh: true,
        fields: [
            {
                key: "mode",
                label: "Running requests",
                type: "choice",
                start: "wait",
                options: [
                    ["wait", "finish first"],
                    ["keep", "freeze until resume"],
                ],
            },
            DRAIN,
        ],
        does: "The worker leaves service and computes nothing; all its state stays.",
        body: (values) => ({ mode: values["mode"], ...numbers(values, "drain_seconds") }),
        command: (values) => `pause${values["mode"] === "keep" ? " --keep" : ""}${drain(values)}`,
    },
    {
        verb: "resume",
        title: "Resume",
        fields: [],
        does: "The pause ends and the worker comes back into service.",
        body: nothing,
        command: () => "resume",
    },
    {
        verb: "clear_kv_blocks",
        title: "Clear prefixes",
        isHarsh: true,
        fields: [],
        does: "All cached prefixes are forgotten, also in host memory and on disk. The next prompts are computed anew.",
        body: nothing,
        command: () => "clear-kv",
    },
    {
        verb: "reset_caches",
        title: "Reset caches",
        isHarsh: true,
        fields: [
            {
                key: "kinds",
                label: "Caches",
                type: "choice",
                start: "",
                options: [
                    ["", "all"],
                    ["prefix", "prefixes"],
                    ["multimodal", "processed media"],
                    ["encoder", "encoder outputs"],
                ],
            },
        ],
        does: "The chosen caches are emptied. The engine refuses while blocks are in use.",
        body: (values) => (values["kinds"] ? { kinds: [values["kinds"]] } : {}),
        command: (values) => `reset-caches${values["kinds"] ? ` --kind ${values["kinds"]}` : ""}`,
    },
    {
        verb: "prove_tiers",
        title: "Prove tiers",
        fields: [],
        does: "A short prompt is loaded from the tiers of the KV cache and its answer compared.",
        body: nothing,
        command: () => "check --live URL",
    },
];

export const LOAD: VerbInfo = {
    verb: "load_lora",
    title: "Load adapter",
    isEverywhere: true,
    fields: [
        { key: "lora_name", label: "Name", type: "text", start: "", isNeeded: true },
        { key: "uri", label: "Source", type: "text", start: "", isNeeded: true },
    ],
    does: "The adapter is fetched, checked and served under its name. The source is a folder on the worker's machine, hf://… or s3://….",
    body: (values) => ({ lora_name: values["lora_name"], source: { uri: values["uri"] } }),
    command: (values) => `lora load ${quoted(values["lora_name"] || "NAME")} ${quoted(values["uri"] || "SOURCE")}`,
};

export function unload(name: string): VerbInfo {
    return {
        verb: "unload_lora",
        title: `Unload ${name}`,
        isEverywhere: true,
        isHarsh: true,
        fields: [],
        does: "The adapter is not served any more, after the requests that use it.",
        body: () => ({ lora_name: name }),
        command: () => `lora unload ${quoted(name)}`,
    };
}

export function restart(process: string): VerbInfo {
    return {
        verb: "restart",
        title: "Restart",
        isHarsh: true,
        isNamed: true,
        fields: [],
        does: "It finishes its requests, ends and is started again; what it cannot finish in time moves to another worker. A worker forgets adapters that were loaded at run time.",
        body: nothing,
        command: () => `restart ${quoted(process)}`,
    };
}

export function drainOf(process: string, isLast: boolean): VerbInfo {
    return {
        verb: "drain",
        title: "Drain",
        isHarsh: true,
        isNamed: true,
        fields: [{ ...DRAIN, label: "Seconds for running requests to finish (empty: the worker's own)", start: "" }],
        does:
            "The worker takes no new requests, finishes those it has, and ends; what it cannot finish in time moves to another worker. It stays stopped until you restart it." +
            (isLast ? " No other worker of its group is ready: requests may fail until then." : ""),
        body: (values) => numbers(values, "drain_seconds"),
        command: (values) => `drain ${quoted(process)}${drain(values)}`,
    };
}

export function scale(group: string, now: number): VerbInfo {
    return {
        verb: "scale",
        title: `Scale ${group}`,
        isNamed: true,
        fields: [{ key: "workers", label: "Workers", type: "number", start: String(now), isNeeded: true }],
        does: `The group ${group} has ${now} now. New workers are started; of too many the newest leave first, after their requests.`,
        body: (values) => numbers(values, "workers"),
        command: (values) => `scale ${quoted(group)} ${values["workers"]}`,
    };
}

export function commandOf(info: VerbInfo, values: Values, worker: string | null): string {
    if (info.isNamed === true) return `dynamo-vllm ${info.command(values)}`;
    const which =
        worker !== null
            ? ` --worker ${quoted(worker)}`
            : info.isEverywhere === true || info.verb === "prove_tiers"
              ? ""
              : " --all";
    return `dynamo-vllm ${info.command(values)}${which}`;
}

export function quoted(text: string): string {
    return /^[\w./:@=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}
