from window import mean

assert mean([2, 4]) == 3.0, mean([2, 4])
print('passed')
