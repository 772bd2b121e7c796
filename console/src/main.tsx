// Starts the page.
import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/pages.css";
import { Shell } from "./shell";
import { start } from "./theme";

start();
const root = document.getElementById("app");
if (root !== null) render(<Shell />, root);
