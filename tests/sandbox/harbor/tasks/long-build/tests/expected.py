def part(rounds, y=5):
    for i in range(rounds):
        y = (y * 31 + i) % 1009
    return y


print(part(7) + part(200))
