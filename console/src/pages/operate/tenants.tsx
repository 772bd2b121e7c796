// The tenants of a gateway and their limits, which hold for all keys of one together.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { sentence } from "../../api";
import { whole } from "../../format";
import { Code } from "../../ui/code";
import { Dialog } from "../../ui/dialog";
import { Notice, Section } from "../../ui/parts";
import { Table } from "../../ui/table";
import { reply } from "./ask";
import { limitFlags, LimitFields, limitsBody, type Limits, type Typed } from "./limits";
import { quoted } from "./verbs";

export interface Tenant extends Limits {
    tenant: string;
    class?: string | null;
}

interface TenantsProps {
    tenants: readonly Tenant[];
    canChange: boolean;
    onChanged: () => void;
}

export function Tenants({ tenants, canChange, onChanged }: TenantsProps): JSX.Element {
    const [open, setOpen] = useState<Tenant | null>(null);
    const close = (): void => {
        setOpen(null);
        onChanged();
    };
    return (
        <Section title="Tenants">
            <Table
                caption="Tenants of the gateway"
                rows={tenants}
                keyOf={(one) => one.tenant}
                columns={[
                    { title: "Tenant", isName: true, cell: (one) => one.tenant },
                    { title: "Class", cell: (one) => one.class ?? "–" },
                    { title: "Requests/min", isNumber: true, cell: (one) => whole(one.requests_per_minute) },
                    { title: "Tokens/min", isNumber: true, cell: (one) => whole(one.tokens_per_minute) },
                    { title: "Tokens/day", isNumber: true, cell: (one) => whole(one.tokens_per_day) },
                    { title: "At a time", isNumber: true, cell: (one) => whole(one.requests_at_a_time) },
                    {
                        title: "Act",
                        cell: (one) =>
                            canChange ? (
                                <button
                                    type="button"
                                    class="small"
                                    aria-label={`Change the limits of ${one.tenant}`}
                                    onClick={() => setOpen(one)}
                                >
                                    Limits
                                </button>
                            ) : null,
                    },
                ]}
            />
            {open === null ? null : <ChangeLimits of={open} onClose={close} />}
        </Section>
    );
}

function ChangeLimits({ of, onClose }: { of: Tenant; onClose: () => void }): JSX.Element {
    const [typed, setTyped] = useState<Typed>({});
    const [problem, setProblem] = useState<string | null>(null);
    const act = (): void => {
        reply("keys_limits", { tenant: of.tenant, ...limitsBody(typed) }).then(onClose, (error: unknown) =>
            setProblem(sentence(error)),
        );
    };
    return (
        <Dialog title={`Limits of ${of.tenant}`} onClose={onClose}>
            <p>They hold for all keys of the tenant together. 0 removes a limit; an empty field leaves it as it is.</p>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    act();
                }}
            >
                <LimitFields typed={typed} onChange={setTyped} placeholder="as it is" least={0} />
                <Code
                    label="The same as a command"
                    text={`dynamo-vllm keys tenant ${quoted(of.tenant)}${limitFlags(typed)}`}
                />
                {problem === null ? null : <Notice>{problem}</Notice>}
                <div class="buttons">
                    <button type="submit" class="primary" disabled={limitFlags(typed) === ""}>
                        Set
                    </button>
                    <button type="button" onClick={onClose}>
                        Cancel
                    </button>
                </div>
            </form>
        </Dialog>
    );
}
