-- needs: run, episode
-- ARGV: episodes. Returns for each the name of its payload, or ''.
local names = {}
for i, episode in ipairs(ARGV) do
  local task_id, m = split(episode)
  names[i] = ''
  if task_id then
    local v = call('HMGET', group_key(task_id), 'f' .. m, 'b' .. m)
    if v[2] then names[i] = payload_name(episode, v[1]) end
  end
end
return names
