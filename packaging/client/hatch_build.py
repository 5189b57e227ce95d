"""Finds the code of the distribution: in the repository outside this folder, in a source distribution inside it."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CODE = "halfway/client"


class ClientCode(BuildHookInterface[Any]):
    """Put the client's code into the wheel, and into the source distribution from which a wheel can be built again."""

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        """Include the folder of the code; raises FileNotFoundError if it is in neither place."""
        root = Path(self.root)
        places = (root / CODE, root.parent.parent / "adapters" / CODE)
        found = next((place for place in places if place.is_dir()), None)
        if found is None:
            raise FileNotFoundError(f"the client's code is missing: {', '.join(map(str, places))}")
        build_data["force_include"][str(found)] = CODE
