"""Names that the shell can complete: deployments that are up, those with logs, their pods."""


def complete_running(incomplete: str) -> list[str]:
    """Deployments that are up."""
    from cleave.local import state

    return [each.name for each in state.running() if each.name.startswith(incomplete)]


def complete_logged(incomplete: str) -> list[str]:
    """Deployments that have logs."""
    from cleave.local import state

    return sorted(
        folder.parent.name
        for folder in state.root().glob("*/logs")
        if folder.parent.name.startswith(incomplete)
    )
