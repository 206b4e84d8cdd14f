"""K and V of two layers in the place of one: which layers are alike, and what a pair keeps.

After Krul ("Efficient State Restoration for Multi-turn Conversations with Dynamic Cross-layer KV
Sharing") and MiniCache, whose merge Krul uses. Lossy: ``bench.accuracy`` measures the loss.
"""
