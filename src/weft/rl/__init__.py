"""The loop weights move for: trainers improve a policy by PPO, engines generate with it, weft keeps them fresh.

    settings     every option of a run
    tasks        what is learned, with a reward that can be verified
    architecture, policy, engine_model     one model twice: as trainers hold it, and as engines do (fused, cut, FP8)
    generation   sampling with a KV cache; what a sample carries
    ppo, optimizer      the objective, and AdamW with FP32 masters behind BF16 weights
    trainer, engine     the two kinds of rank
    rank, member, links the process around one, and how it reaches the others
    methods      how weights get from one to the other: weft, or collectives
    coordinator, messages, ledger       who generates what, how old it may be, where samples go
    verification, checkpoint            bit-for-bit checks of what engines hold; resuming
    launch, network_env                 members as processes of one machine, or under torchrun
    record, live, report, charts        what a person sees

Members know each other only through weft and the coordinator. Weights are moved with weft's public names alone.
"""
