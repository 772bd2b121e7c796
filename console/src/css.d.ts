// Style sheets are bundled by esbuild; TypeScript needs to know that they can be imported.
declare module "*.css";
