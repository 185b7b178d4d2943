"""Fill in the templates of this folder: HTML pages, in which every value is text, and Markdown."""

from functools import cache
from typing import Any

import jinja2

from surefoot.terminal import visible_lines


@jinja2.pass_eval_context
def _shown(context: jinja2.nodes.EvalContext, value: Any) -> Any:
    """A value as text of a page, with escapes for unprintable characters; in Markdown the value itself."""
    return value if not context.autoescape or hasattr(value, "__html__") else visible_lines(str(value))


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("surefoot.compare"),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def rendered(template: str, **values: Any) -> str:
    """A template with its values; markup in the values of an HTML page is escaped."""
    return _environment().get_template(template).render(values)
