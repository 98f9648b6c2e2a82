"""Why a module cannot be trained privately, under Opacus' names."""


class UnsupportedError(ValueError):
    """Something that cannot be trained privately."""


class UnsupportedModuleError(UnsupportedError):
    """A module that cannot be trained privately."""


class UnsupportableModuleError(UnsupportedModuleError):
    """A module that cannot be trained privately, and has no replacement."""


class NotYetSupportedModuleError(UnsupportedModuleError):
    """A module that no rule of the engine covers as it is used."""


class ShouldReplaceModuleError(UnsupportedModuleError):
    """A module for which ``ModuleValidator.fix`` has a replacement."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """A module whose options, or whose mode, keep it from being trained privately."""
