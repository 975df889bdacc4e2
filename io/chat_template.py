"""Chat templates: a list of messages becomes the one text that the model was trained to continue.

A template is a program that came with the weights, so it runs in a sandbox that ends (io/template_bounds.py), and
whatever it raises belongs to the one row that it was rendering.  The environment is the one that templates are written
for, that of transformers: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a plain `tojson`, and a
`generation` block that only trainers need.  A message's keys that are null are dropped, as there, for many templates
print "None".

The clock is read once, when the template is opened: rows of one job must not differ because midnight passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from bgmpi.errors import InputError, MissingError
from bgmpi.io.template_bounds import BoundedSandbox


class ChatRefused(ValueError):
    """The template cannot render these messages; the text says why in the template's own words."""


class _Generation(jinja2.ext.Extension):
    """Renders `{% generation %}...{% endgeneration %}` as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The compiled templates of one tokenizer: `default`, and perhaps `tool_use` for chats with tools."""

    def __init__(self, templates: Mapping[str, str], *, now: datetime | None = None) -> None:
        moment = now or datetime.now()
        self._sandbox = environment = BoundedSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = moment.strftime
        self._compiled: dict[str, jinja2.Template] = {}
        for name, text in templates.items():
            try:
                self._compiled[name] = environment.from_string(text)
            except Exception as error:  # so deep that Python's own compiler gives up, and more
                raise InputError(f"chat template {name!r} is not valid jinja: {error}; "
                                 f"name another with --chat-template FILE") from error
        self._default = "default" if "default" in templates else next(iter(templates))
        self.text = templates[self._default]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None,
               documents: Sequence[Any] | None, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """Return the text of one chat; raise ChatRefused when the template will not have it."""
        template = self._compiled.get("tool_use") if tools else None
        template = template or self._compiled[self._default]
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        names = {**variables, "messages": present, "tools": list(tools) if tools else None,
                 "documents": list(documents) if documents else None, "add_generation_prompt": add_generation_prompt}
        self._sandbox.begin()
        try:
            return self._sandbox.whole(template.generate(names))
        except Exception as error:  # a template is a foreign program: anything it raises is about this row
            raise ChatRefused(str(error) or type(error).__name__) from error


def find_templates(folder: Path, settings: Mapping[str, Any], override: Path | str | None = None) -> dict[str, str]:
    """Return the templates by name, {} when there is none.

    First found wins: `override` (a file, or template text when it holds a brace), chat_template.jinja in `folder`
    with the files of additional_chat_templates/, chat_template.json, then `chat_template` of tokenizer_config.json (a
    string, or a list of {name, template}).
    """
    if override is not None:
        return {"default": _override_text(override)}
    found: dict[str, str] = {}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _read(file)
    value: Any = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        value = _read(folder / "chat_template.jinja")
    elif (folder / "chat_template.json").is_file():
        try:
            value = json.loads(_read(folder / "chat_template.json"))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / 'chat_template.json'}: expected an object with chat_template") from error
    if isinstance(value, str):
        return {**found, "default": value}
    if isinstance(value, list):
        try:
            return {**found, **{str(entry["name"]): str(entry["template"]) for entry in value}}
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder}: chat_template is a list, expected entries with name and template") from error
    if value is not None:
        raise InputError(f"{folder}: chat_template is {type(value).__name__}, expected text or a list of templates")
    return found


def _override_text(override: Path | str) -> str:
    if isinstance(override, str) and "{" in override:
        return override
    if not Path(override).is_file():
        raise MissingError(f"--chat-template {override}: no such file (template text must hold a brace)")
    return _read(Path(override))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat template {file}: cannot be read: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
