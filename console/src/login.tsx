// Asks for the admin token, or an admin key of the gateway, where the server wants one. It goes into a cookie that scripts cannot read.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { post, sentence } from "./api";
import { Input, Notice } from "./ui/parts";

export function Login({ onDone, given }: { onDone: () => Promise<void>; given: string }): JSX.Element {
    const [token, setToken] = useState("");
    const [problem, setProblem] = useState<string | null>(null);
    const [isBusy, setBusy] = useState(false);
    const enter = async (): Promise<void> => {
        setBusy(true);
        try {
            await post("api/login", { token });
            await onDone();
        } catch (error) {
            setProblem(sentence(error));
        }
        setBusy(false);
    };
    return (
        <main class="alone">
            <form
                class="card"
                onSubmit={(event) => {
                    event.preventDefault();
                    void enter();
                }}
            >
                <h1>dynamo-vllm console</h1>
                <p class="faint">Log in with {given}.</p>
                <Input label="Admin token or key" type="password" value={token} onInput={setToken} required wide />
                {problem === null ? null : <Notice>{problem}</Notice>}
                <button type="submit" class="primary" disabled={isBusy || token === ""}>
                    Log in
                </button>
            </form>
        </main>
    );
}
