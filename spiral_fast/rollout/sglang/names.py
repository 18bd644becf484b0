"""Names that the parts of this folder share."""

KEY_VARIABLE = "SPIRAL_FAST_SERVER_KEY"  # environment: the API key of a server
PARENT_VARIABLE = "SPIRAL_FAST_SERVER_PARENT"  # environment: the process a server must not outlive
