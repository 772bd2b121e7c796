// "Why there?": the recent requests, and for each one how the router chose its worker.
import type { JSX } from "preact";
import { useStore } from "../state";
import { route } from "../route";
import { RequestDetailView } from "./requests/detail";
import { RequestList } from "./requests/list";

export function RequestsPage(): JSX.Element {
    const { rest } = useStore(route);
    return rest === "" ? <RequestList /> : <RequestDetailView key={rest} id={rest} />;
}
