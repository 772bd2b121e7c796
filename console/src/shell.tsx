// The frame around every page: navigation, connection, theme; or the login page.
import type { ComponentType, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { get, post, sentence, whenLoginNeeded } from "./api";
import { connection, listen, overview, settings } from "./live";
import { Login } from "./login";
import { BenchPage } from "./pages/bench";
import { CachesPage } from "./pages/caches";
import { LogsPage } from "./pages/logs";
import { OperatePage } from "./pages/operate";
import { OverviewPage } from "./pages/overview";
import { PerformancePage } from "./pages/performance";
import { PlaygroundPage } from "./pages/playground";
import { RequestsPage } from "./pages/requests";
import { route } from "./route";
import { store, useStore } from "./state";
import { choose, theme, type Theme } from "./theme";
import type { Settings } from "./types";
import { Notice } from "./ui/parts";

const PAGES: readonly (readonly [page: string, title: string, view: ComponentType])[] = [
    ["", "Overview", OverviewPage],
    ["playground", "Playground", PlaygroundPage],
    ["requests", "Why there?", RequestsPage],
    ["caches", "Caches", CachesPage],
    ["performance", "Performance", PerformancePage],
    ["bench", "Bench", BenchPage],
    ["logs", "Logs", LogsPage],
    ["operate", "Operate", OperatePage],
];
const SETTINGS_SECONDS = 15;

const isLoginNeeded = store(false);
const problem = store<string | null>(null);

async function loadSettings(): Promise<void> {
    try {
        const value = await get<Settings>("api/settings");
        settings.set(value);
        isLoginNeeded.set(value.needs_login && value.logged_in !== true);
        problem.set(null);
    } catch (error) {
        problem.set(sentence(error));
    }
}

export function Shell(): JSX.Element {
    const login = useStore(isLoginNeeded);
    const known = useStore(settings);
    const said = useStore(problem);
    useEffect(() => {
        whenLoginNeeded(() => isLoginNeeded.set(true));
        void loadSettings();
        const timer = window.setInterval(
            () => !document.hidden && !isLoginNeeded.get() && void loadSettings(),
            SETTINGS_SECONDS * 1000,
        );
        return () => window.clearInterval(timer);
    }, []);
    const isIn = known !== null && !login;
    useEffect(() => (isIn ? listen() : undefined), [isIn]);
    if (login) return <Login onDone={loadSettings} given={known?.login_with ?? "the value of --admin-token"} />;
    if (known === null)
        return <main class="alone">{said === null ? <p class="empty">Loading…</p> : <Notice>{said}</Notice>}</main>;
    return <Frame known={known} />;
}

function Frame({ known }: { known: Settings }): JSX.Element {
    const { page } = useStore(route);
    const [isOpen, open] = useState(false);
    const [, title, View] = PAGES.find(([name]) => name === page) ?? PAGES[0]!;
    const heading = useRef<HTMLHeadingElement>(null);
    const isFirst = useRef(true);
    useEffect(() => {
        document.title = `${title} · dynamo-vllm console`;
        open(false);
        // A new page is announced by its heading; the first one is not, so that the first Tab finds the skip link.
        if (!isFirst.current) heading.current?.focus();
        isFirst.current = false;
        window.scrollTo(0, 0);
    }, [title]);
    return (
        <div class="frame">
            <a
                class="skip"
                href="#content"
                onClick={(event) => {
                    event.preventDefault();
                    heading.current?.focus();
                }}
            >
                Skip to content
            </a>
            <header class="side">
                <div class="brand">
                    <strong>dynamo-vllm</strong>
                    <button
                        type="button"
                        class="menu small"
                        aria-expanded={isOpen}
                        aria-controls="nav"
                        onClick={() => open(!isOpen)}
                    >
                        Menu
                    </button>
                </div>
                <nav id="nav" aria-label="Pages" class={isOpen ? "open" : ""}>
                    <ul>
                        {PAGES.map(([name, text]) => (
                            <li key={name}>
                                <a href={`#/${name}`} aria-current={text === title ? "page" : undefined}>
                                    {text}
                                    <Count page={name} />
                                </a>
                            </li>
                        ))}
                    </ul>
                    <Foot known={known} />
                </nav>
            </header>
            <main id="content">
                <div class="top">
                    <h1 ref={heading} tabIndex={-1}>
                        {title}
                    </h1>
                    <Where known={known} />
                </div>
                <View />
            </main>
        </div>
    );
}

/** The number of problems beside Overview. */
function Count({ page }: { page: string }): JSX.Element | null {
    const now = useStore(overview);
    const n = page === "" ? (now?.problems.length ?? 0) : 0;
    return n === 0 ? null : (
        <span class="count">
            <span class="hidden">, problems: </span>
            {n}
        </span>
    );
}

function Where({ known }: { known: Settings }): JSX.Element {
    const state = useStore(connection);
    const words = { waiting: "connecting", live: "live", lost: "no connection, trying again" }[state];
    return (
        <p class="where">
            {known.namespace === null ? null : <span class="mono cut">{known.namespace}</span>}
            {known.url === null ? null : <span class="mono cut">{known.url}</span>}
            {known.read_only ? <span class="tag">read only</span> : null}
            <span class={`state ${state === "live" ? "good" : "warn"}`} role="status">
                {words}
            </span>
        </p>
    );
}

function Foot({ known }: { known: Settings }): JSX.Element {
    const chosen = useStore(theme);
    const [said, say] = useState<string | null>(null);
    const leave = (): void => {
        // A new page has nothing of this one: no running answers, no conversations, no key.
        post("api/logout", {}).then(
            () => location.reload(),
            (error: unknown) => say(sentence(error)),
        );
    };
    return (
        <div class="foot">
            <label for="theme">Colours</label>
            <select id="theme" value={chosen} onChange={(event) => choose(event.currentTarget.value as Theme)}>
                <option value="system">as the system</option>
                <option value="light">light</option>
                <option value="dark">dark</option>
            </select>
            {known.grafana === null || !/^https?:\/\//.test(known.grafana) ? null : (
                <a href={known.grafana} rel="noreferrer" target="_blank">
                    Grafana
                </a>
            )}
            {known.needs_login ? (
                <button type="button" class="small" onClick={leave}>
                    Log out
                </button>
            ) : null}
            {said === null ? null : <Notice>{said}</Notice>}
            {known.version === null ? null : <span class="faint">version {known.version}</span>}
        </div>
    );
}
