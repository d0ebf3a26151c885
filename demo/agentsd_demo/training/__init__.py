"""What made the toy model, outside of the wheel: assets, training, finetuning, figures."""
