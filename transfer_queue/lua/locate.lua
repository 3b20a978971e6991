-- needs: run, server, episode
-- ARGV: episodes. Returns for each {name of its payload, bytes}; bytes −1: in the batch log; 0: nowhere.
local rows = {}
for i, episode in ipairs(ARGV) do
  local task_id, m = split_episode(episode)
  rows[i] = {'', 0}
  if task_id then
    local v = call('HMGET', group_key(task_id), 'f' .. m, 'b' .. m, 'p' .. m)
    if v[2] then rows[i] = {payload_name(episode, v[1]), tonumber(v[2])} end
    if v[3] then rows[i] = {episode, -1} end
  end
end
return rows
