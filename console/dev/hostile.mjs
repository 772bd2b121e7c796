// Names that try to be markup, and that no line has room for.

const TAIL = "n".repeat(160);

export const HOSTILE = `<img src=x onerror=alert(1)>${TAIL}`;
export const HOSTILE_BASE = `"><script>alert(2)</script>${TAIL}`;
