// Text to take away, such as a command.
import type { JSX } from "preact";
import { useState } from "preact/hooks";

export function Code({ text, label }: { text: string; label: string }): JSX.Element {
    const [said, say] = useState("");
    const copy = (): void => {
        const byHand = (): void => say("Select and copy it by hand");
        // Over plain HTTP, except on loopback, browsers have none.
        const clipboard = navigator.clipboard as Clipboard | undefined;
        if (clipboard === undefined) byHand();
        else clipboard.writeText(text).then(() => say("Copied"), byHand);
        window.setTimeout(() => say(""), 2500);
    };
    return (
        <div class="code">
            <pre tabIndex={0} role="region" aria-label={label}>
                <code>{text}</code>
            </pre>
            <button type="button" class="small" onClick={copy} aria-label={`Copy: ${label}`}>
                {said === "" ? "Copy" : said}
            </button>
            <span class="hidden" role="status">
                {said}
            </span>
        </div>
    );
}
