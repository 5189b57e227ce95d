"""The check policy as settings: the fields, defaults and bounds of the domain model, for pydantic."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import msgspec
from pydantic import ConfigDict, Field, GetPydanticSchema, create_model
from pydantic_core.core_schema import no_info_after_validator_function

from halfway.domain.policy import CheckPolicy


def _field(field: msgspec.structs.FieldInfo) -> tuple[Any, Any]:
    """Return the pydantic type of a policy field, with its bounds, and its default."""
    kind, *metas = get_args(field.type) or (field.type,)
    bounds = [Field(gt=meta.gt, ge=meta.ge, le=meta.le) for meta in metas]
    return (Annotated[kind, *bounds] if bounds else kind), field.default


_PolicyFields: Any = create_model(
    "_PolicyFields",
    __config__=ConfigDict(extra="forbid", allow_inf_nan=False),
    **dict[str, Any]({field.name: _field(field) for field in msgspec.structs.fields(CheckPolicy)}),
)
Policy = Annotated[
    CheckPolicy,
    GetPydanticSchema(
        lambda _, handler: no_info_after_validator_function(
            lambda fields: CheckPolicy(**dict(fields)), handler.generate_schema(_PolicyFields)
        )
    ),
]
