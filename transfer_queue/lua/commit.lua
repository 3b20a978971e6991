-- ARGV: step. Steps below it are durable elsewhere. Returns {1} | {-1, error}.
local step, committed, version = tonumber(ARGV[1]), metan('committed'), metan('version')
if step > version then return {-1, 'step ' .. step .. ' cannot be committed: the current version is ' .. version} end
for s = committed, step - 1 do
  for _, group in ipairs(redis.call('LRANGE', P .. ':step:' .. s, 0, -1)) do
    for _, name in ipairs(members(group)) do
      local e = fields(episode_key(name))
      if e.state == 'completed' then
        discard_payload(name, e)
        bump('committed_episodes', 1)
      end
    end
    forget_group(group)
    bump('groups_trained', -1)
    bump('groups_committed', 1)
  end
  redis.call('DEL', P .. ':step:' .. s)
end
if step > committed then redis.call('HSET', META, 'committed', step) end
return {1}
