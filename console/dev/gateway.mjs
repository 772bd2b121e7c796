// Invents a gateway's keys, tenants and usage. Each verb returns what is said and the reply.
import { HOSTILE } from "./hostile.mjs";

export function makeGateway({ hostile }) {
    const NO_LIMITS = { requests_per_minute: null, tokens_per_minute: null, tokens_per_day: null };
    const tenantOf = (tenant) => ({
        tenant,
        class: "normal",
        ...NO_LIMITS,
        requests_per_minute: 6000,
        requests_at_a_time: 64,
    });
    const keyOf = (key, name, tenant) => ({
        key,
        name,
        tenant,
        state: "active",
        ...NO_LIMITS,
        requests_per_minute: 600,
        tokens_per_day: 5000000,
        requests_at_a_time: 8,
    });
    let tenants = ["research", ...(hostile ? [HOSTILE] : [])].map(tenantOf);
    let keys = [keyOf("dv-3f9a", "alice", "research"), ...(hostile ? [keyOf("dv-77b0", HOSTILE, HOSTILE)] : [])];
    const usage = { requests: 91234, prompt_tokens: 41e6, cached_tokens: 22e6, output_tokens: 9e6 };
    return {
        keys_list: () => ["listed", { keys, tenants }],
        keys_create: (body) => {
            const key = `dv-${keys.length}c1d`;
            keys = [...keys, { key, state: "active", ...NO_LIMITS, tenant: null, ...body }];
            return ["created", { key, secret: "dv-secret-shown-once" }];
        },
        keys_revoke: (body) => {
            keys = keys.map((key) => (key.key === body.key ? { ...key, state: "revoked" } : key));
            return ["revoked"];
        },
        keys_limits: ({ tenant: name, ...limits }) => {
            tenants = tenants.map((one) => (one.tenant === name ? { ...one, ...limits } : one));
            return [`limits of ${name} are set`, tenants.find((one) => one.tenant === name)];
        },
        usage: () => ["", { rows: tenants.map((one) => ({ name: one.tenant, ...usage })) }],
    };
}
