"""What goes wrong for a reason that the user can mend.

UserError            a message, and the command that mends it; `finetune` exits with 1
  ConfigError        config.yaml, one line per problem
  DataError          a sample, a caption, a picture, a folder of them
  CacheError         the cache misses something, or was made for something else
  ResumeError        the checkpoint can't continue this run
  DiskFullError      no room for what a fit writes
"""


class UserError(Exception):
    """A failure that names what was seen, where, and the next command."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class CacheError(UserError):
    pass


class ResumeError(UserError):
    pass


class DiskFullError(UserError):
    pass
