"""Sphinx configuration; ``tools/docs.sh`` builds the site.

The source directory is the repository, so that relative links work both here and on GitHub.
"""

from __future__ import annotations

import pathlib
import sys

import imagenet_fast

sys.path.insert(0, str(pathlib.Path(__file__).parent / "extensions"))

project = "imagenet_fast"
release = imagenet_fast.__version__
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs/**", "gcp/README.md", "benchmarks/**/README.md"),
]
# Sphinx would look through all files of hidden folders, data and runs.
exclude_patterns = ["docs/_build", "docs/contents.md", ".*", "data", "runs"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    # In docs/extensions.
    "front_page",
    "architecture",
    "from_code",
    "number_columns",
    "signatures",
]

myst_heading_anchors = 3
smartquotes_action = "D"  # dashes only

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # os.environ is one
napoleon_use_ivar = True
napoleon_use_rtype = False  # it is in the signature
python_maximum_signature_line_length = 88

nitpick_ignore_regex = [
    # Names of other projects.
    (
        r"py:.*",
        r"(collections|contextlib|keras|np|numpy|os|pathlib|subprocess|tensorflow|tf|types|msgspec)\..*",
    ),
    (r"py:.*", r"ctypes\..*"),
    (r"py:.*", r"matplotlib\..*"),
    (r"py:class", r"imagenet_fast\..*\._\w+"),  # type variables
    # Which options all models take: models.batch_norm.norm_arguments says what they are.
    (r"py:class", "NormOptions"),
    # data.examples.Label: the number of a class, or those of several.
    (r"py:class", "Label"),
    # Private classes; users see Source.
    (r"py:class", r"imagenet_fast\.data\.prepare\.sources\.\w+\.\w+Source"),
]

html_theme = "furo"
html_title = f"imagenet_fast {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
