// Writes down what is said in a recording.
import type { JSX } from "preact";
import { useId, useState } from "preact/hooks";
import { Outcome, useTask } from "./task";

export function Transcription({ model }: { model: string }): JSX.Element {
    const [file, setFile] = useState<File | null>(null);
    const [task, go] = useTask<{ text?: string }>();
    const id = useId();
    const ask = (): void => {
        if (file === null) return;
        const form = new FormData();
        form.set("model", model);
        form.set("file", file);
        void go("v1/audio/transcriptions", form);
    };
    return (
        <>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    ask();
                }}
            >
                <div class="field wide">
                    <label for={id}>Recording</label>
                    <input
                        id={id}
                        type="file"
                        accept="audio/*,video/*"
                        onChange={(event) => setFile(event.currentTarget.files?.[0] ?? null)}
                    />
                    <span class="hint">at most 16 MB</span>
                </div>
                <div class="buttons">
                    <button type="submit" class="primary" disabled={task.isBusy || file === null}>
                        Write down
                    </button>
                </div>
            </form>
            <Outcome task={task} />
            {task.value === null ? null : <div class="text">{task.value.text ?? ""}</div>}
        </>
    );
}
