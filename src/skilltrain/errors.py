"""The one error a user is meant to read: what is wrong, where, and what to do."""


class SkilltrainError(Exception):
    """A fault in what the user gave us; the command line prints it as one line and exits with code 2."""

    def __init__(self, what: str, *, where: object = None, fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        place = f"{where}: " if where is not None else ""
        advice = f" ({fix})" if fix else ""
        super().__init__(f"{place}{what}{advice}".replace("\n", " "))


class StoppedError(SkilltrainError):
    """Signal `number` (Ctrl-C, SIGTERM) ended a long work; what was done is kept, and the same command goes on."""

    def __init__(self, what: str, *, where: object = None, fix: str = "", number: int) -> None:
        super().__init__(what, where=where, fix=fix)
        self.number = number


def reason_of(error: Exception) -> str:
    """What an error says, without the number and the path that the system puts around it."""
    return getattr(error, "strerror", None) or str(error)
