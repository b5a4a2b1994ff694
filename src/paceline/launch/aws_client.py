"""Calls AWS for copies at s3://, and turns its errors into one line that says what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.launch.json_fields import Answer

if TYPE_CHECKING:
    import boto3

_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError")
_STRANGERS = (
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "InvalidClientTokenId",
    "AuthFailure",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
    "OptInRequired",
)
_USUAL_REGION = "us-east-1"
_MAX_CHARACTERS = 300  # of a page that some proxy answers instead
_CREDENTIALS = (
    "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`"
)
NO_CREDENTIALS = f"no AWS credentials were found: {_CREDENTIALS}"


class AwsError(InfrastructureError):
    """AWS refused a call; `code` is its own name for the reason."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@final
class Aws:
    """The account and region that the user's AWS configuration names."""

    def __init__(self, session: "boto3.Session", region: str) -> None:
        self.region = region
        self._session = session
        self._services: dict[str, object] = {}

    def call(self, service: str, operation: str, **arguments: object) -> Answer:
        """Call an operation, named as in boto3. Tries again where AWS asks for it; blocks.

        Args:
            service: For example `ec2`.
            arguments: As boto3 wants them.

        Raises:
            UsageError: No credentials, or they don't permit it; the message names the permission.
            AwsError: AWS refused for another reason.
            InfrastructureError: AWS can't be reached.
        """
        with _errors_explained(service, operation):
            return Answer(getattr(self._service(service), operation)(**arguments))

    def pages(
        self, service: str, operation: str, listed: str, **arguments: object
    ) -> Iterator[Answer]:
        """Call an operation as often as it has more to list, and give what is listed.

        Args:
            listed: The answer's member with the list.
            arguments: As boto3 wants them.
        """
        with _errors_explained(service, operation):
            for page in self._service(service).get_paginator(operation).paginate(**arguments):
                yield from Answer(page)[listed]

    def _service(self, service: str) -> Any:
        from botocore.config import Config

        if service not in self._services:
            config = Config(
                connect_timeout=10,
                read_timeout=60,
                retries={"total_max_attempts": 5, "mode": "standard"},
            )
            make: Callable[..., object] = self._session.client
            self._services[service] = make(service, region_name=self.region, config=config)
        return self._services[service]


def connect() -> Aws:
    """Read the user's AWS configuration. Nothing is called yet.

    Raises:
        UsageError: boto3 isn't installed, or there is no profile or credentials.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UsageError(
            "copies at s3:// need boto3, which isn't installed: pip install 'paceline[s3]'"
        ) from error
    try:
        session = boto3.Session()
        # Found here, so that a missing profile is reported before anything is called.
        credentials = session.get_credentials()
    except BotoCoreError as error:
        raise UsageError(f"your AWS configuration can't be used: {error}") from error
    if credentials is None:
        raise UsageError(NO_CREDENTIALS)
    return Aws(session, session.region_name or _USUAL_REGION)


@contextmanager
def _errors_explained(service: str, operation: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        raise _refusal(service, operation, Answer(dict(error.response))) from error
    except (BotoCoreError, ResponseParserError) as error:
        raise _failure(service, operation, error) from error


def _refusal(service: str, operation: str, answer: Answer) -> PacelineError:
    code, message = answer["Error"].text("Code"), answer["Error"].text("Message")
    called = f"{service}:{operation.title().replace('_', '')}"
    if code in _DENIED:
        return UsageError(
            f"your AWS credentials lack the permission {called}: ask for it, or use others"
        )
    if code in _STRANGERS:
        return UsageError(f"AWS doesn't accept your credentials ({code}): {_CREDENTIALS}")
    return AwsError(f"AWS refused {called}: {message} ({code})", code)


def _failure(service: str, operation: str, error: Exception) -> PacelineError:
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return UsageError(NO_CREDENTIALS)
    reason = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return InfrastructureError(f"AWS couldn't be asked ({service} {operation}): {reason}")
