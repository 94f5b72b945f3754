"""Environments of other libraries as environments of agentrl: TextArena, Gymnasium, OpenEnv, NeMo Gym, reasoning-gym."""
