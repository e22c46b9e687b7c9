"""The samples of the tasks for lm-eval: in a file of their own, for both environments read them."""

SAMPLES = [
    {"question": "The capital of France is", "choices": [" Paris", " Berlin", " a banana"]},
    {"question": "The opposite of hot is", "choices": [" cold", " seven"]},
    {"question": "Two plus two is", "choices": [" four", " four hundred and twelve"]},
    {"question": "Q: Which animal says meow?\nA:", "choices": [" A cat", " A cow", " Größe 你好"]},
]
