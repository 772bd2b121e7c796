// Builds the page into src/dynamo_vllm/console/assets; with --check it only compares what is there with the sources.
import { readFile, mkdir, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "src", "dynamo_vllm", "console", "assets");
const shipped = ["preact", "uplot"];

async function outputs() {
    const built = await build({
        absWorkingDir: here,
        entryPoints: { app: "src/main.tsx" },
        outdir: "out",
        bundle: true,
        write: false,
        minify: true,
        sourcemap: false,
        legalComments: "none",
        charset: "utf8",
        format: "esm",
        target: ["chrome123", "firefox121", "safari17.5"],
        jsx: "automatic",
        jsxImportSource: "preact",
        define: { "process.env.NODE_ENV": '"production"' },
    });
    const files = new Map(built.outputFiles.map((file) => [file.path.split("/").at(-1), file.text]));
    files.set("index.html", await readFile(join(here, "src", "index.html"), "utf8"));
    files.set("licenses.txt", await licenses());
    return files;
}

/** Returns the licence texts of what the bundle contains. */
async function licenses() {
    const texts = [];
    for (const name of shipped) {
        const folder = join(here, "node_modules", name);
        const { version } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
        texts.push(`${name} ${version}\n\n${(await readFile(join(folder, "LICENSE"), "utf8")).trim()}\n`);
    }
    return texts.join("\n\n");
}

const files = await outputs();
if (process.argv.includes("--check")) {
    const stale = [];
    for (const [name, text] of files) {
        const there = await readFile(join(target, name), "utf8").catch(() => "");
        if (there !== text) stale.push(name);
    }
    if (stale.length > 0) {
        console.error(
            `${stale.join(", ")} in src/dynamo_vllm/console/assets is not what console/ gives; run make console`,
        );
        process.exit(1);
    }
} else {
    await mkdir(target, { recursive: true });
    for (const [name, text] of files) await writeFile(join(target, name), text);
    for (const [name, text] of files) console.log(`${name}: ${(Buffer.byteLength(text) / 1024).toFixed(1)} KB`);
}
