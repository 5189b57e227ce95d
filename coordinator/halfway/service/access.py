"""Who may act for a group: everybody, until an operator configures access control."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfway.domain.records import Group


class OpenAccess:
    """The `Authority` of a coordinator without access control."""

    def require(self, credential: str | None, group: Group | None, *, action: str) -> None:
        """Let everybody do everything."""
