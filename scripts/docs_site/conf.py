"""The builder's settings (Sphinx)."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "src" / "dynamo_vllm" / "__init__.py").read_text())

project = "dynamo-vllm"
copyright = "dynamo-vllm contributors, Apache-2.0"
version = release = VERSION[1] if VERSION else ""
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns: list[str] = []

# Pages are written for code hosts as well: no syntax that only this builder reads.
myst_enable_extensions: list[str] = []
myst_heading_anchors = 6
smartquotes = False  # they make a dash of the two of a flag
highlight_language = "text"
# Examples are cut with "…" and stay readable without colours.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"dynamo-vllm {version}"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_logo = str(HERE / "static" / "logo.svg")
html_favicon = str(HERE / "static" / "logo.svg")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_use_index = False
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#1f6f50", "color-brand-content": "#1f6f50"},
    "dark_css_variables": {"color-brand-primary": "#6fd3a6", "color-brand-content": "#6fd3a6"},
}
copybutton_prompt_text = r"\$ |> "
copybutton_prompt_is_regexp = True
