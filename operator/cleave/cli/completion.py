"""Shell completion of deployment names."""


def complete_running(incomplete: str) -> list[str]:
    """Names of running deployments that begin with `incomplete`."""
    from cleave.local import state

    return [each.name for each in state.list_running() if each.name.startswith(incomplete)]


def complete_logged(incomplete: str) -> list[str]:
    """Names of deployments with logs that begin with `incomplete`."""
    from cleave.local import state

    return sorted(
        folder.parent.name
        for folder in state.get_root().glob("*/logs")
        if folder.parent.name.startswith(incomplete)
    )
