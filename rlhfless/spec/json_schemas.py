"""Users' JSON schemas. References are resolved only within the schema: nothing is fetched or opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhfless.util.errors import first_line

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def schema_validator(schema: Any) -> Validator:
    """Return a validator of the draft that the schema names. Raises ValueError if it is not a JSON schema, or refers to
    anything outside itself other than the drafts, which are in memory."""
    # Imported here, so that specs without such a reward do not wait for the import.
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        outside = next(_outside(schema, str(kind.META_SCHEMA["$schema"])), None)
    except jsonschema.SchemaError as error:
        raise ValueError(f"is no JSON schema: {first_line(error)}") from error
    except (AttributeError, TypeError, RecursionError) as error:  # in parts the draft's own schema does not check
        raise ValueError(f"is no JSON schema: {type(error).__name__}: {error}") from error
    if outside is not None:
        raise ValueError(f"refers to {outside!r}, which is not in the schema itself; copy it under `$defs`")
    # The default registry would fetch missing schemas.
    validator: Validator = kind(schema, registry=Registry())
    return validator


def _outside(schema: Any, draft: str) -> Iterator[str]:
    """Yield references that lead out of the schema, in all parts that a reference or keyword reaches."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    specification = specification_with(draft)
    root = specification.create_resource(schema)
    left = [(REGISTRY.resolver_with_root(root), root)]
    seen = set()
    while left:
        resolver, part = left.pop()
        if id(part.contents) in seen or not isinstance(part.contents, Mapping):
            continue
        seen.add(id(part.contents))
        for reference in filter(None, map(part.contents.get, _REFERENCES)):
            try:
                resolved = resolver.lookup(reference)
            except (Unresolvable, ValueError):
                yield str(reference)
                continue
            left.append((resolved.resolver, specification.create_resource(resolved.contents)))
        left += [(resolver.in_subresource(inner), inner) for inner in part.subresources()]
