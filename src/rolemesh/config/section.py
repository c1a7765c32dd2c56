"""What all sections of options have in common. Used by the schema."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: frozen, strict about names, with docstrings as field descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    short: ClassVar[str | None] = None
    """Option that a text stands for: where a list of such sections is due, a text means one section with this option alone."""
