def fits(count, room):
    return count <= room
