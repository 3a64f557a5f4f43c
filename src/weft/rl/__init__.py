"""The RL loop: trainers improve a policy by PPO, engines generate with it, weft keeps the engines fresh.

    settings   every option of a run
    model/     one model twice: as trainers hold it, and as engines do (fused, cut, FP8)
    learn/     tasks with verifiable rewards, sampling, PPO, AdamW with FP32 masters, checkpoints
    run/       the two kinds of rank and the processes around them, how they reach each other, how weights get from one
               to the other (weft, or collectives), the coordinator, the record of what happened
    view/      live lines, and a page at the end

Members know each other only through weft and the coordinator. Weights are moved with weft's public names alone.
"""
