"""Google's errors as ours: NoCredentials and Denied (exit code 1), QuotaExceeded (3), Unconfirmed (7: it was asked, and
there is no answer to rely on), and the three answers that a caller takes for one."""

import re

from kimisession.cloud.permissions import grant_command
from kimisession.errors import KimiError, QuotaExceeded, Unconfirmed

LOGIN = "gcloud auth application-default login"

#: With this the library begins what Google said.
_CALL = re.compile(r"^(?:GET|POST|DELETE|PATCH|PUT) https?://\S+: ")

_BUSY = frozenset({429, 500, 502, 503, 504})


class NoCredentials(KimiError):
    """Nobody is logged in, or the login has expired."""


class Denied(KimiError):
    """The account may not do this. `permission` is the missing one where Google named it."""

    def __init__(self, message: str, hint: str = "", permission: str = "") -> None:
        super().__init__(message, hint)
        self.permission = permission


class Missing(KimiError):
    """404: there is no such thing."""


class Exists(KimiError):
    """409, and it is not because something is in use."""


class Moved(KimiError):
    """412: somebody else was quicker."""


def busy(error: Exception) -> bool:
    """Whether asking again may help: named answers and broken connections."""
    code = getattr(error, "code", None)
    if isinstance(code, int) and (code in _BUSY or (code == 403 and "rateLimitExceeded" in str(error))):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    retryable = getattr(error, "retryable", True)  # google.auth: an expired login stays expired
    broken = {"ConnectionError", "Timeout", "ChunkedEncodingError", "RetryError", "TransportError"}
    return bool(names & broken) and bool(retryable)


def translated(error: Exception, what: str, project: str) -> KimiError | None:
    """Google's error as one of ours; None for what is not Google's."""
    if isinstance(error, KimiError):
        return error
    code, text = getattr(error, "code", None), first_line(error)
    if isinstance(code, int):
        if (
            code == 404
            and "projects/" in text
            and "/" not in text.partition("projects/")[2].strip("'\" ").split("'")[0]
        ):
            return Denied(f"could not {what}: there is no project {project}, or you may not see it", "--project P")
        kinds: dict[int, type[KimiError]] = {404: Missing, 412: Moved}
        if code == 409 and "already exists" in text:
            return Exists(text)
        if code in kinds:
            return kinds[code](text)
        if code == 401:
            return NoCredentials(f"could not {what}: Google does not accept the credentials ({text})", LOGIN)
        if code == 403 and "quota" in text.lower():
            return QuotaExceeded(f"could not {what}: {text}", "kimisession quota")
        if code == 403:
            return _denied(what, text, project)
        return Unconfirmed(f"could not {what}: Compute Engine says {code}: {text}")
    if type(error).__module__.startswith("google.auth"):
        return NoCredentials(f"could not {what}: the login is not valid any more ({text})", LOGIN)
    if type(error).__module__.startswith(("google.api_core", "requests")):
        return Unconfirmed(f"could not {what}: {type(error).__name__}: {text}")
    return None


def _denied(what: str, text: str, project: str) -> Denied:
    permission = re.search(r"'([a-z]+(?:\.[A-Za-z]+){2})'", text)
    if "disabled" in text or "has not been used" in text:
        return Denied(
            f"could not {what}: Compute Engine is not enabled in project {project}",
            f"gcloud services enable compute.googleapis.com --project {project}",
        )
    named = permission.group(1) if permission else ""
    lacking = f"this account lacks {named} on project {project}" if named else text
    grant = grant_command(project, (named,)) if named else f"kimisession guard permissions --project {project}"
    return Denied(f"could not {what}: {lacking}", grant, named)


def first_line(error: BaseException) -> str:
    """What Google said, in one line of at most 300 characters."""
    text = getattr(error, "message", "") or (str(error.args[0]) if error.args else str(error))
    lines = [line.strip() for line in _CALL.sub("", str(text)).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
