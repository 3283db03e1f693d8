"""What is said where a model computes what is no number, to whoever runs it."""


def no_numbers(what: str, dtype: str) -> str:
    """`what`: a plural, such as "the model's logits". `dtype`: of the activations, "" = not known."""
    said = f"{what} are not numbers (NaN or infinite)"
    if dtype == "float32":
        return (
            f"{said}, in float32, the widest there is: the model's files are damaged, or its config.json does not "
            "fit its weights; get it or import it again"
        )
    return f"{said}{dtype and f', in {dtype}'}; load the model with dtype float32"
