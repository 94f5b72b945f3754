"""Self-play: opponents, snapshots of the policy, ratings, results by seat, a collapse alarm, exploitability.

Other packages need these modules: ``training`` (`SelfPlay`, what the training loop calls), ``opponents`` and ``games`` (lineups
and results of evaluations), ``game_scores`` (exploitability of the engines' policy), ``check``, and ``league_log`` and
``league_plot`` for ``agentrl league``.

Lineups, seats, players and games (`agentrl.core.lineup`, `agentrl.core.turn_game`, …) lie in ``core`` and the episodes of
several agents in ``episode``: runs with ``env.roles`` use them without self-play.
"""
