"""Refusals in Google's words and Google's JSON."""

from .state import Json

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}


class Refused(Exception):
    """An HTTP error. `reason` is the word in `errors[].reason`, `domain` in `errors[].domain`."""

    def __init__(self, code: int, reason: str, message: str, domain: str = "global") -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.domain = code, reason, message, domain

    def body(self) -> Json:
        """As Compute Engine writes it; the other services' clients read the same `code`, `message` and `status`."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "errors": [{"message": self.message, "domain": self.domain, "reason": self.reason}],
                "status": _STATUS.get(self.code, "UNKNOWN"),
            }
        }


class Failed(Exception):
    """An operation that was accepted and then failed: `error.errors[]` of the operation."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class LostReply(Exception):
    """Close the connection without a word: the act has happened, and the client does not hear of it."""


def not_found(path: str) -> Refused:
    """`path` as in projects/p/zones/z/instances/i."""
    return Refused(404, "notFound", f"The resource '{path}' was not found")


def invalid(field: str, value: object, why: str) -> Refused:
    """400, in Compute Engine's sentence about a field."""
    return Refused(400, "invalid", f"Invalid value for field '{field}': '{value}'. {why}")
