"""What TRL's client of a server is made with."""


class NCCLTrainerSendWeightsArgs:
    """Nobody sends any to a server."""


class NCCLWeightTransferEngine:
    """Nor opens one."""
