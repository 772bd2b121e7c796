// A question before something is done: the browser's own dialog, which keeps the focus inside and closes with Escape.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

interface DialogProps {
    title: string;
    onClose: () => void;
    children: ComponentChildren;
}

export function Dialog({ title, onClose, children }: DialogProps): JSX.Element {
    const box = useRef<HTMLDialogElement>(null);
    const name = useId();
    useEffect(() => {
        const before = document.activeElement;
        box.current?.showModal();
        return () => {
            if (before instanceof HTMLElement && before.isConnected) before.focus();
        };
    }, []);
    return (
        <dialog ref={box} aria-labelledby={name} onClose={onClose} onCancel={onClose}>
            <h2 id={name}>{title}</h2>
            {children}
        </dialog>
    );
}
