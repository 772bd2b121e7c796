// A small line without axes beside a figure; what it shows is also in the chart of the performance page.
import type { JSX } from "preact";

const WIDTH = 120;
const HEIGHT = 26;

export function Spark({ values }: { values: readonly (number | null)[] }): JSX.Element {
    const most = Math.max(1e-9, ...values.map((value) => value ?? 0));
    const step = WIDTH / Math.max(1, values.length - 1);
    const points = values
        .map((value, i) =>
            value === null
                ? null
                : `${(i * step).toFixed(1)},${(HEIGHT - 2 - (value / most) * (HEIGHT - 4)).toFixed(1)}`,
        )
        .filter((point) => point !== null)
        .join(" ");
    return (
        <svg class="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
            <polyline points={points} />
        </svg>
    );
}
