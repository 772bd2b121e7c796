// Keys and usage of a deployment with a gateway.
import type { JSX } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";
import { sentence } from "../../api";
import { whole } from "../../format";
import { Code } from "../../ui/code";
import { Dialog } from "../../ui/dialog";
import { Choice, Input, Notice, Section, State } from "../../ui/parts";
import { Table } from "../../ui/table";
import { reply } from "./ask";
import { limitFlags, LimitFields, limitsBody, type Limits, type Typed } from "./limits";
import { Tenants, type Tenant } from "./tenants";
import { quoted } from "./verbs";

interface Key extends Limits {
    key: string;
    name: string;
    tenant: string | null;
    state: string;
}

interface Usage {
    name: string;
    requests: number;
    prompt_tokens: number;
    cached_tokens: number | null;
    output_tokens: number;
}

export function Gateway({ verbs }: { verbs: ReadonlySet<string> }): JSX.Element {
    const [keys, setKeys] = useState<Key[]>([]);
    const [tenants, setTenants] = useState<Tenant[]>([]);
    const [problem, setProblem] = useState<string | null>(null);
    const [open, setOpen] = useState<"new" | Key | null>(null);
    const load = useCallback((): void => {
        reply<{ keys: Key[]; tenants?: Tenant[] }>("keys_list", {}).then(
            (value) => {
                setKeys(value.keys);
                setTenants(value.tenants ?? []);
            },
            (error: unknown) => setProblem(sentence(error)),
        );
    }, []);
    useEffect(load, []);
    const close = (): void => {
        setOpen(null);
        load();
    };
    const create = verbs.has("keys_create") ? (
        <>
            <span class="push" />
            <button type="button" class="small" onClick={() => setOpen("new")}>
                Create a key
            </button>
        </>
    ) : null;
    return (
        <>
            <Section title="Keys" aside={create}>
                {problem === null ? null : <Notice>{problem}</Notice>}
                <Table
                    caption="Keys of the gateway"
                    rows={keys}
                    keyOf={(key) => key.key}
                    empty="No key yet."
                    columns={[
                        { title: "Name", isName: true, cell: (key) => key.name },
                        { title: "Key", cell: (key) => <span class="mono">{key.key}…</span> },
                        { title: "Tenant", cell: (key) => key.tenant ?? "–" },
                        { title: "State", cell: (key) => <State of={key.state} /> },
                        { title: "Requests/min", isNumber: true, cell: (key) => whole(key.requests_per_minute) },
                        { title: "Tokens/min", isNumber: true, cell: (key) => whole(key.tokens_per_minute) },
                        { title: "Tokens/day", isNumber: true, cell: (key) => whole(key.tokens_per_day) },
                        {
                            title: "Act",
                            cell: (key) =>
                                verbs.has("keys_revoke") && key.state !== "revoked" ? (
                                    <button
                                        type="button"
                                        class="small"
                                        aria-label={`Revoke ${key.name}`}
                                        onClick={() => setOpen(key)}
                                    >
                                        Revoke
                                    </button>
                                ) : null,
                        },
                    ]}
                />
            </Section>
            {tenants.length === 0 ? null : (
                <Tenants tenants={tenants} canChange={verbs.has("keys_limits")} onChanged={load} />
            )}
            {verbs.has("usage") ? <UsageTable /> : null}
            {open === "new" ? <NewKey onClose={close} /> : null}
            {open !== null && open !== "new" ? <Revoke of={open} onClose={close} /> : null}
        </>
    );
}

function NewKey({ onClose }: { onClose: () => void }): JSX.Element {
    const [name, setName] = useState("");
    const [tenant, setTenant] = useState("");
    const [limits, setLimits] = useState<Typed>({});
    const [secret, setSecret] = useState<string | null>(null);
    const [problem, setProblem] = useState<string | null>(null);
    const [isBusy, setBusy] = useState(false);
    const create = (): void => {
        setBusy(true);
        setProblem(null);
        const body = {
            name,
            ...(tenant === "" ? {} : { tenant }),
            ...limitsBody(limits),
        };
        reply<{ secret: string }>("keys_create", body).then(
            (value) => setSecret(value.secret),
            (error: unknown) => {
                setProblem(sentence(error));
                setBusy(false);
            },
        );
    };
    const flags = limitFlags(limits);
    return (
        <Dialog title="Create a key" onClose={onClose}>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    create();
                }}
            >
                {secret === null ? (
                    <>
                        <Input label="Name" value={name} onInput={setName} required />
                        <Input label="Tenant" value={tenant} onInput={setTenant} />
                        <LimitFields typed={limits} onChange={setLimits} placeholder="no limit" least={1} />
                        <Code
                            label="The same as a command"
                            text={`dynamo-vllm keys create ${quoted(name || "NAME")}${tenant === "" ? "" : ` --tenant ${quoted(tenant)}`}${flags}`}
                        />
                    </>
                ) : (
                    <>
                        <p role="status">The secret of {name}. It is shown once; nobody can read it later.</p>
                        <Code label="Secret" text={secret} />
                    </>
                )}
                {problem === null ? null : <Notice>{problem}</Notice>}
                <div class="buttons">
                    {secret === null ? (
                        <button type="submit" class="primary" disabled={isBusy || name.trim() === ""}>
                            Create
                        </button>
                    ) : null}
                    <button type="button" onClick={onClose}>
                        {secret === null ? "Cancel" : "Close"}
                    </button>
                </div>
            </form>
        </Dialog>
    );
}

function Revoke({ of, onClose }: { of: Key; onClose: () => void }): JSX.Element {
    const [problem, setProblem] = useState<string | null>(null);
    const act = (): void => {
        reply("keys_revoke", { key: of.key }).then(onClose, (error: unknown) => setProblem(sentence(error)));
    };
    return (
        <Dialog title={`Revoke ${of.name}`} onClose={onClose}>
            <p>The key ends; running gateways know it within a second. It cannot be undone.</p>
            <Code label="The same as a command" text={`dynamo-vllm keys revoke ${quoted(of.key)}`} />
            {problem === null ? null : <Notice>{problem}</Notice>}
            <div class="buttons">
                <button type="button" class="danger" onClick={act}>
                    Revoke
                </button>
                <button type="button" onClick={onClose}>
                    Cancel
                </button>
            </div>
        </Dialog>
    );
}

const BY = [
    ["tenant", "tenant"],
    ["key", "key"],
    ["model", "model"],
    ["day", "day"],
] as const;

function UsageTable(): JSX.Element {
    const [by, setBy] = useState("tenant");
    const [rows, setRows] = useState<Usage[]>([]);
    const [problem, setProblem] = useState<string | null>(null);
    useEffect(() => {
        reply<{ rows: Usage[] }>("usage", { by }).then(
            (value) => setRows(value.rows),
            (error: unknown) => setProblem(sentence(error)),
        );
    }, [by]);
    return (
        <Section title="Usage">
            <div class="bar-of">
                <Choice label="By" value={by} options={BY} onChoose={setBy} />
            </div>
            {problem === null ? null : <Notice>{problem}</Notice>}
            <Table
                caption={`Usage by ${by}`}
                rows={rows}
                keyOf={(row) => row.name}
                columns={[
                    { title: by, isName: true, cell: (row) => row.name },
                    { title: "Requests", isNumber: true, cell: (row) => whole(row.requests) },
                    { title: "Prompt tokens", isNumber: true, cell: (row) => whole(row.prompt_tokens) },
                    { title: "of them cached", isNumber: true, cell: (row) => whole(row.cached_tokens) },
                    { title: "Answer tokens", isNumber: true, cell: (row) => whole(row.output_tokens) },
                ]}
            />
        </Section>
    );
}
