def dozens(count):
    return count * 12
