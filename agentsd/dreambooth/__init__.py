"""DreamBooth finetuning with agent attention in every step (Agent Attention, appendix B.4)."""
